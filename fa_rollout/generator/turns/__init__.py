"""One prompt to one whole turn, over as many requests as it takes."""

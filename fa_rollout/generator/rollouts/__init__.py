"""Groups from prompt to scored samples, for training and evaluation."""

"""One page that tells a whole run: verdict, pictures, samples; and the same timeline as a trace file."""

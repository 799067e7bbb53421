"""`make images-check`: the images are built, and run as the chart runs them; see `__main__`."""

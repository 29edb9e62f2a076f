"""The figures of the site: a module each, with `draw`."""

"""Who has, sends and computes what, found from sizes, masks and layouts without an array."""

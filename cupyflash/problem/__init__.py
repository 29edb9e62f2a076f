"""A call as it is understood: validated arguments, sizes, and expressions bound to them."""

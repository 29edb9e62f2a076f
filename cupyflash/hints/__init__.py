"""What errors advise: the name that was meant, what other libraries call it, what to install."""

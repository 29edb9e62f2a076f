"""The command line of `cupyflash`: one module for each command, and what they share."""

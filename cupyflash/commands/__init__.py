"""What `cupyflash` does on the command line: a module for a command, and what they share."""

"""Files and the disk: seams to the operating system."""

"""What the library asks of the machine under it: files, locks, interrupts, processes, meshes of devices."""

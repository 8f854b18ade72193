"""What the library needs from the machine: files, locks, interrupts, processes and meshes of devices."""

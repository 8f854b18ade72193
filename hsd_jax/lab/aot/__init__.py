"""Programs compiled for devices that are not there: what `hsd compile` counts."""

"""Work of the codec that runs on a device; each file needs the package it is named for."""

"""What users touch: the fabric, its client, the command line, engines."""

"""What traffic does to an engine, worked out without a device."""

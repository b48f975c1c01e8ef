"""Pipeline stages of consecutive layers: partition, schedules and execution."""

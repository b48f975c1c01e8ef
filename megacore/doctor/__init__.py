"""The doctor: a look at every machine of a job before it starts, and what to do about faults."""

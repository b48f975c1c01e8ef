"""The doctor: looks at every machine of a job before the job does, and says what to do where something is wrong."""

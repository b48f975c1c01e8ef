"""Start of ranks on this host, on hosts reached over ssh, or through a batch system."""

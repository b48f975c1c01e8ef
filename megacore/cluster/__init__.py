"""Starting ranks on machines: this one, hosts reached over ssh, or a batch system's."""

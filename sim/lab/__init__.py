"""The laboratory: networks of namespaces on one Linux host, impaired by its kernel. Root only; nothing of the host's own
network is touched."""

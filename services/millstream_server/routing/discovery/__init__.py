"""Where the workers are: lists, DNS names, files and Kubernetes services; changes are followed."""

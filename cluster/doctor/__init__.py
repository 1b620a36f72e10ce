"""What is wrong with the hosts of a deployment, or with those that are to be some."""

"""A site's data: what is registered, how it is read, and whether it meets a job's contract."""

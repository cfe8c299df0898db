"""The shared language of a federation: values, messages, the job file and the error tree."""

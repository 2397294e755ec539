"""What a pool serves of the requests that others have recorded."""

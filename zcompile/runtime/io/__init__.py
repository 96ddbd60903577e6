"""The io package reads and writes files and directories, also asynchronously."""

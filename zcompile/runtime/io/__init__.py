"""Files and directories, and asynchronous reads and writes of them."""

"""Adapters for libraries that cannot do something with an offloaded model by themselves, and
callbacks that log what is measured.

Each is a module of its own, which imports the library; nothing else imports it.
"""

"""Adapters for libraries that cannot do something with an offloaded model by themselves.

Each is a module of its own, named after the library that it imports; nothing else imports it.
"""

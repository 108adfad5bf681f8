"""Results as files: JSON, its schema, and text.

codec               plans as files of JSON, and back
schema              the JSON Schema of such files
whole_file          files that are written whole or not at all
text                results print by the renderer of their type
plan_laws           what holds of every plan
"""

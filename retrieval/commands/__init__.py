"""The command line's commands, one module a topic, one thin function a command. Nothing heavy is imported at the top."""

#!/usr/bin/env bash
# The soak as a test.
exec broker/blocks/soak "$@"

package command

import "errors"

const smallSegment = 536

// limitSegment is an error: Windows has no such option, and nothing is said of MTU holes.
func limitSegment(uintptr, int) error { return errors.ErrUnsupported }

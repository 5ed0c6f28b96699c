package tunnel

import (
	"errors"
	"fmt"
)

// errNoCloseWrite is what a stream answers whose carrier has no half-close.
var errNoCloseWrite = fmt.Errorf("tunnel: the carrier cannot half-close: %w", errors.ErrUnsupported)

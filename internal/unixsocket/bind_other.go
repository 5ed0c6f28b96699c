//go:build !unix

package unixsocket

import (
	"errors"
	"io/fs"
	"net"
)

// The mode of a file does not say here who may connect.
const supported = false

func bind(string, fs.FileMode, int) (*net.UnixListener, error) { return nil, errors.ErrUnsupported }

func lookupGroup(string) (int, error) { return 0, errors.ErrUnsupported }

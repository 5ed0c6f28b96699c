//go:build !linux || !(amd64 || arm64)

package tunnel

import "net"

// A perch is not to be had here: who waits for a socket keeps a goroutine.
type perch struct{}

func (*pump) findPerch(net.Conn) {}
func (*pump) perches() bool      { return false }
func (*pump) copySocket() error  { panic("unreachable") }
func (*pump) settle() bool       { return false }
func (*pump) leave()             {}
func (*pump) fell() bool         { return false }

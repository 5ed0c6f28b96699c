//go:build !linux || !(amd64 || arm64)

package tunnel

import "net"

// A kernelRelay is not to be had here: every tunnel takes the other path.
type kernelRelay struct{}

func (*kernelRelay) carry(*job) bool                        { return false }
func (*kernelRelay) all(*Relay) []listed                    { return nil }
func (*kernelRelay) held(*Relay, bool) ([]heldTunnel, bool) { return nil, true }

func socketKeeps(net.Conn) int64 { return 0 }

func (*kernelRelay) wait() {}

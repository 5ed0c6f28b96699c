//go:build !linux || !(amd64 || arm64)

package tunnel

// A pulse is not to be felt here: keepalive finds a dead peer.
type pulse struct{}

func (*copyTunnel) ask(last, now int64) string { return "" }

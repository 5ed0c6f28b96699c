//go:build !linux || !(amd64 || arm64)

package tunnel

func (c *Conn) fill(limit int) error { return c.fillRead(limit) }

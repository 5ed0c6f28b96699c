//go:build !linux

package tunnel

func (c *Conn) fill(limit int) error { return c.fillRead(limit) }

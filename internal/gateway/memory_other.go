//go:build !linux

package gateway

// A cgroup is a thing of Linux.
type cgroup struct{}

func (*cgroup) sockets() bool { return false }

func ownCgroup() *cgroup { return nil }

func (*cgroup) read() (held, limit int64, ok bool) { return 0, 0, false }

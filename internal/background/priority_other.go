//go:build !linux

package background

func onLowPriority(f func()) { f() }

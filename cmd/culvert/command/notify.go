package command

import (
	"net"
	"os"
)

// notify tells the service manager how this process is, as sd_notify(3) has
// it: where $NOTIFY_SOCKET names a socket, a datagram goes there. Who listens
// there may be gone, and nothing is lost by that.
func notify(state string) {
	path := os.Getenv("NOTIFY_SOCKET") // "@" begins the name of an abstract one, for package net too
	if path == "" {
		return
	}
	c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return
	}
	defer c.Close()
	_, _ = c.Write([]byte(state))
}

// States of a notification.
const (
	notifyReady     = "READY=1"
	notifyReloading = "RELOADING=1"
	notifyStopping  = "STOPPING=1"
)

// Package poll waits for sockets. On Linux it has an event loop around epoll, a
// TCP connection and a listener that Go's poller does not know until somebody
// has to block on them, and the raw system calls that the loop's users need.
// Elsewhere it stands for package net, and connections wait on goroutines.
//
// A Loop owns an epoll set and one goroutine. Whoever wants events of a
// descriptor is a Handler, registered at the Loop under a Token:
//
//	l.Lock()
//	token := l.Register(h)
//	err := l.Watch(fd, poll.In, token, 0)
//	l.Unlock()
//
// Handlers run on the Loop's goroutine, one at a time. One that serves a
// connection is a Task of the Loop: where it has to wait, it first hands the
// Loop to another goroutine and keeps its own.
//
// The package knows nothing of tunnels and makes no decision about them.
package poll

import "time"

// PeerCheckInterval is how often a PeerCheck is to check a socket.
const PeerCheckInterval = 5 * time.Second

// Clock is a monotonic clock for timestamps that fit a word: nanoseconds since
// the process began.
func Clock() int64 { return int64(time.Since(epoch)) }

var epoch = time.Now()

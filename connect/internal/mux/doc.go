// Package mux is what HTTP/2 and HTTP/3 share as carriers of CONNECT: requests that are
// admitted and refused alike (Server), the two GOAWAYs of a drain (GoAway), the points
// that frames cost (Meter, and Purse on the client's side), and the connections that a
// dialer shares between its streams (Pool). It knows the frames of neither.
package mux

// OrDefault returns v, or def unless v is greater than zero.
func OrDefault[T ~int | ~int64](v, def T) T {
	if v > 0 {
		return v
	}
	return def
}

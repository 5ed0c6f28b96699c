// Package route sets up the interface lo, routes and rules of routing, by rtnetlink and
// without the program ip. It is for Linux; the formats are those of rtnetlink(7).
package route

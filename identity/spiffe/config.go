package spiffe

import (
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"strings"
	"time"
)

// A Config says which keys and trust of the Store a Source keeps.
type Config struct {
	// Keys has the SPIFFE id by the name of the key. An empty id takes the SVID that
	// the agent names first, which is its default (Workload API section 5.3).
	Keys map[string]string

	// Trust has the trust domain by the name of the trust.
	Trust map[string]string
}

// A Status says how a Source and its agent are.
type Status struct {
	Socket  string   `json:"socket"`
	Streams []Stream `json:"streams"`
	SVIDs   []SVID   `json:"svids,omitempty"`   // as the agent lists them
	Bundles []string `json:"bundles,omitempty"` // trust domains with an X.509 bundle or JWT keys, sorted
}

// A Stream is one of the calls by which the agent tells of changes.
type Stream struct {
	Name    string    `json:"name"`             // "x509Svids", "x509Bundles" or "jwtBundles"
	Updates uint64    `json:"updates"`          // messages so far
	Updated time.Time `json:"updated,omitzero"` // when the last came
	Problem string    `json:"problem,omitempty"`
}

// An SVID is an X.509-SVID that the agent has given.
type SVID struct {
	ID      string    `json:"id"`
	Expires time.Time `json:"expires"`
}

// target returns what gRPC dials for the socket of a Workload API (Workload Endpoint
// section 4): a URI unix:///PATH, or tcp://IP:PORT.
func target(socket string) (string, error) {
	u, err := url.Parse(socket)
	if err != nil {
		return "", fmt.Errorf("socket %q is not a URI: write unix:///PATH or tcp://IP:PORT", socket)
	}
	if u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return "", fmt.Errorf("socket %q: a user, a query or a fragment has no meaning here", socket)
	}
	switch u.Scheme {
	case "unix":
		path := u.Path
		if u.Opaque != "" { // unix:/PATH and unix:PATH are the same to gRPC
			path = u.Opaque
		}
		if u.Host != "" || !strings.HasPrefix(path, "/") {
			return "", fmt.Errorf("socket %q: want unix:/// and an absolute path", socket)
		}
		return "unix://" + path, nil
	case "tcp":
		addr, err := netip.ParseAddrPort(u.Host)
		if err != nil || u.Path != "" || addr.Port() == 0 {
			return "", fmt.Errorf("socket %q: want tcp:// with an IP address and a port", socket)
		}
		return "passthrough:///" + addr.String(), nil
	}
	return "", fmt.Errorf("socket %q: want unix:///PATH or tcp://IP:PORT", socket)
}

// CheckSocket returns an error if socket cannot be that of a Workload API.
func CheckSocket(socket string) error {
	if socket == "" {
		return errors.New("no socket: want unix:///PATH or tcp://IP:PORT")
	}
	_, err := target(socket)
	return err
}

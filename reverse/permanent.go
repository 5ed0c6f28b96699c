package reverse

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"

	"culvert.dev/tunnel"
)

// Permanent reports whether err, the SessionState.Err of a session that could not be opened,
// comes again until the configuration of one of the two sides changes: a certificate that is
// not accepted, credentials that are missing, an address where there is no gateway. A Client
// tries all the same.
func Permanent(err error) bool {
	var (
		unknown x509.UnknownAuthorityError
		host    x509.HostnameError
		plain   tls.RecordHeaderError
		op      *net.OpError
		refused *tunnel.Error
	)
	switch {
	case errors.As(err, &unknown), errors.As(err, &host), errors.As(err, &plain):
		return true
	case errors.As(err, &op) && op.Op == "remote error": // an alert of TLS
		return true
	case errors.As(err, &refused):
		switch refused.Reason {
		case tunnel.NoAuth, tunnel.Denied, tunnel.NotExposed, tunnel.NoRoute, tunnel.Unsupported, tunnel.BadRequest:
			return true
		}
	}
	return false
}

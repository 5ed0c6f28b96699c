package annotations

import (
	"fmt"
	"strings"

	"culvert.dev/registry"
)

// ForwardIdentity is the annotation of an Identity, without Prefix.
const ForwardIdentity = "forward-identity"

// An Identity says how the endpoints of a Service are told who a client is. The zero one has
// them not told. It is comparable.
type Identity struct {
	Told bool
	registry.ForwardIdentity
}

const identityHint = `write insideTLS, and after it "; assertion=true" and "; audience=NAME" where the service verifies it, or "beforeTLS; trustNetwork=true" where nobody but gateways can connect to the service`

// maxAudience is how long an audience may be, in bytes.
const maxAudience = 2048

// ParseIdentity reads the value of ForwardIdentity: "insideTLS; assertion=true;
// audience=shop.example.com", or "beforeTLS; trustNetwork=true". Its keys are those of
// forwardIdentity in the configuration file.
func ParseIdentity(value string) (Identity, error) {
	position, rest, more := strings.Cut(value, ";")
	id := Identity{Told: true}
	switch position = strings.TrimSpace(position); position {
	case "insideTLS":
		id.InsideTLS = true
	case "beforeTLS":
	default:
		return Identity{}, fmt.Errorf("%.40q is no position of a header: %s", position, identityHint)
	}
	seen := map[string]string{}
	for more {
		var item string
		item, rest, more = strings.Cut(rest, ";")
		key, v, _ := strings.Cut(item, "=")
		key, v = strings.TrimSpace(key), strings.TrimSpace(v)
		if _, again := seen[key]; again {
			return Identity{}, fmt.Errorf("%.40q is there twice", key)
		}
		seen[key] = v
		switch key {
		case "assertion", "trustNetwork":
			if v != "true" && v != "false" {
				return Identity{}, fmt.Errorf("%s is %.40q: write true or false", key, v)
			}
		case "audience":
			if v == "" || len(v) > maxAudience || strings.ContainsFunc(v, func(r rune) bool { return r <= ' ' || r > '~' }) {
				return Identity{}, fmt.Errorf("audience %.40q is no name of a service", v)
			}
		default:
			return Identity{}, fmt.Errorf("%.40q is unknown: %s", key, identityHint)
		}
	}
	id.Assertion, id.Audience = seen["assertion"] == "true", seen["audience"]
	trusted := seen["trustNetwork"] == "true"
	switch {
	case id.InsideTLS && trusted:
		return Identity{}, fmt.Errorf("trustNetwork has no effect: it is for beforeTLS")
	case !id.InsideTLS && id.Assertion:
		return Identity{}, fmt.Errorf("assertion needs insideTLS: it is bound to the TLS session that the header is in")
	case !id.InsideTLS && !trusted:
		return Identity{}, fmt.Errorf("whoever can connect to the service can say by such a header who it is: write insideTLS, or add trustNetwork=true if nobody but gateways can")
	case id.Audience != "" && !id.Assertion:
		return Identity{}, fmt.Errorf("audience has no effect: it is that of an assertion")
	}
	return id, nil
}

// Apply sets the fields of a service that i is about.
func (i *Identity) Apply(to *registry.Service) {
	if i.Told {
		how := i.ForwardIdentity
		to.ProxyProtocol, to.ForwardIdentity = 2, &how
	}
}

// ReadIdentity returns the Identity of a Service by its annotation, or that of its Namespace if
// it has none. Either map may be nil. The Problem is nil if the annotation is well-formed.
func ReadIdentity(service, namespace map[string]string) (Identity, *Problem) {
	value, ok := service[Prefix+ForwardIdentity]
	inherited := false
	if !ok {
		value, inherited = namespace[Prefix+ForwardIdentity]
	}
	if !ok && !inherited {
		return Identity{}, nil
	}
	id, err := ParseIdentity(value)
	if err != nil {
		return Identity{}, &Problem{Key: ForwardIdentity, Value: Clip(value), Namespace: inherited, Err: err}
	}
	return id, nil
}

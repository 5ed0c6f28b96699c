package file

import (
	"slices"

	"culvert.dev/registry"
	"go.yaml.in/yaml/v3"
)

// A forwardIdentity says how the endpoints of a service are told who a client is.
type forwardIdentity struct {
	ProxyProtocol string `yaml:"proxyProtocol" oneof:"v2" default:"v2"`
	Position      string `yaml:"position" oneof:"insideTLS beforeTLS" default:"insideTLS"`
	TrustNetwork  bool   `yaml:"trustNetwork"`
	Assertion     bool   `yaml:"assertion"`
	Audience      string `yaml:"audience"`
}

// insideTLS reports whether the header is in the TLS session of the gateway.
func (f *forwardIdentity) insideTLS() bool { return f.Position != "beforeTLS" }

// registered returns f as the registry has it.
func (f *forwardIdentity) registered() *registry.ForwardIdentity {
	return &registry.ForwardIdentity{InsideTLS: f.insideTLS(), Assertion: f.Assertion, Audience: f.Audience}
}

// check finds keys of f that do not go together.
func (f *forwardIdentity) check(d *decoder, at mapping) {
	if f.insideTLS() {
		if at.value("trustNetwork") != nil && f.TrustNetwork {
			d.errorf(at.value("trustNetwork"), "leave it out", "trustNetwork has no effect: it is for position: beforeTLS")
		}
	} else {
		if f.Assertion {
			d.errorf(at.value("assertion"), "make position insideTLS", "assertion needs position: insideTLS: it is bound to the TLS session that the header is in")
		}
		if !f.TrustNetwork {
			d.warnf(at.value("position"), "make it insideTLS, or say trustNetwork: true if nobody but gateways can connect to the endpoints", "whoever can connect to an endpoint can say by such a header who it is")
		}
	}
	if at.value("audience") != nil && !f.Assertion {
		d.errorf(at.value("audience"), "add assertion: true, or leave it out", "audience has no effect: it is that of an assertion")
	}
}

// checkIn finds what of f does not go with the service that it is of.
func (f *forwardIdentity) checkIn(d *decoder, s *service, at mapping) {
	n := at.value("forwardIdentity")
	if at.value("proxyProtocol") != nil {
		d.errorf(at.value("proxyProtocol"), "leave it out", "the service has proxyProtocol, and so has its forwardIdentity")
	}
	switch {
	case !f.insideTLS():
	case s.TLS == nil:
		d.errorf(n, "add tls, or make position beforeTLS", "forwardIdentity tells of the client inside TLS, and the gateway speaks none to the endpoints")
	case s.TLS.PassClientTLS:
		d.errorf(n, "leave passClientTLS out, or make position beforeTLS", "forwardIdentity tells of the client inside TLS of the gateway, and passClientTLS has clients with TLS of their own")
	case f.Assertion && s.TLS.Key == "" && s.TLS.CertificateFile == "":
		d.errorf(n, "add certificateFile and keyFile to tls, or key", "an assertion is signed with the key of the gateway's client certificate, and tls names none")
	}
}

// A hopIdentity says how requests to the last gateway on the way state who a client is.
type hopIdentity struct {
	Assertion  bool   `yaml:"assertion,short" what:"forwardIdentity"`
	XFCC       string `yaml:"xfcc" oneof:"none sanitizeSet appendForward" default:"none"`
	ClientCert bool   `yaml:"clientCert"`
}

// registered returns f as the registry has it.
func (f *hopIdentity) registered() (out registry.HopIdentity) {
	if f == nil {
		return out
	}
	out.Assertion, out.ClientCert = f.Assertion, f.ClientCert
	if f.XFCC != "none" {
		out.XFCC = f.XFCC
	}
	return out
}

// check finds a hopIdentity that states nothing.
func (f *hopIdentity) check(d *decoder, at mapping) {
	if at.node.Kind != yaml.MappingNode || f.registered() != (registry.HopIdentity{}) {
		return
	}
	off := []string{"", "false", "none"} // anything else is a mistake that was reported
	if slices.Contains(off, at.word("assertion")) && slices.Contains(off, at.word("xfcc")) && slices.Contains(off, at.word("clientCert")) {
		d.errorf(at.node, "add assertion: true, xfcc: sanitizeSet or clientCert: true, or leave it out", "forwardIdentity states in no form who a client is")
	}
}

// hasDelegates reports whether any trust lists gateways that may state callers. It reads the
// document, for hops may be checked before the identity is read.
func (d *decoder) hasDelegates() bool {
	trust := d.root.object("identity").value("trust")
	if trust == nil || trust.Kind != yaml.MappingNode {
		return false
	}
	for i := 1; i < len(trust.Content); i += 2 {
		if len((mapping{trust.Content[i]}).words("delegates")) > 0 {
			return true
		}
	}
	return false
}

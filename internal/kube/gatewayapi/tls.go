package gatewayapi

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"culvert.dev/registry"
)

// autoPassthrough is the key of tls.options that makes a Passthrough listener
// an Istio east-west gateway: names "outbound_.PORT_.SUBSET_.SERVICE" lead to
// that service, if it is exposed.
const autoPassthrough = "culvert.dev/auto-passthrough"

// caKey is the key of a ConfigMap that has certificates of CAs.
const caKey = "ca.crt"

// resolveTLS finds the certificates of a Gateway's listeners, those that
// their clients' are verified by, and the one that backends are shown.
func (t *translator) resolveTLS(g *gateway) {
	t.resolveClient(g)
	for _, l := range g.all() {
		if l.refused.Type != "" || !l.terminates() {
			continue
		}
		l.ends = &registry.TLSTermination{}
		t.resolveCertificates(l)
		t.resolveValidation(l)
		if l.broken || l.refused.Type != "" {
			l.ends = nil
		}
	}
	g.insecure = insecure(g.Spec.TLS)
}

// insecure reports whether a part of a frontend lets clients in that can't be verified.
func insecure(c *gwv1.GatewayTLSConfig) bool {
	if c == nil || c.Frontend == nil {
		return false
	}
	falls := func(v *gwv1.FrontendTLSValidation) bool { return v != nil && v.Mode == gwv1.AllowInsecureFallback }
	if falls(c.Frontend.Default.Validation) {
		return true
	}
	for _, p := range c.Frontend.PerPort {
		if falls(p.TLS.Validation) {
			return true
		}
	}
	return false
}

// resolveCertificates finds the certificates of a listener where TLS ends. It is
// served with those that are good, and refuses everybody where none is.
func (t *translator) resolveCertificates(l *listener) {
	const kind = string(gwv1.ListenerConditionResolvedRefs)
	from := referrer{gwv1.GroupName, l.ownerKind(), l.owner().GetNamespace()}
	var refs []gwv1.SecretObjectReference
	if l.spec.TLS != nil {
		refs = l.spec.TLS.CertificateRefs
	}
	for i := range refs {
		key, denied, err := t.key(from, refs[i])
		switch {
		case denied:
			l.refs = condition(kind, false, string(gwv1.ListenerReasonRefNotPermitted), err.Error())
		case err != nil && l.refs.Reason != string(gwv1.ListenerReasonRefNotPermitted):
			l.refs = condition(kind, false, string(gwv1.ListenerReasonInvalidCertificateRef), err.Error())
		}
		if key != "" {
			l.ends.Keys = append(l.ends.Keys, key)
		}
	}
	if len(l.ends.Keys) == 0 {
		l.broken = true
		if l.refs.Type == "" {
			l.refs = condition(kind, false, string(gwv1.ListenerReasonInvalidCertificateRef), "TLS is terminated here, but there are no certificateRefs")
		}
	}
}

// key finds the certificate and key of a Secret, and returns their name, which is in the
// Result; denied says that the error is for lack of a grant. With a name and an error what
// the Secret had before stays in force, and the error is to be told.
func (t *translator) key(from referrer, ref gwv1.SecretObjectReference) (name string, denied bool, err error) {
	pair, denied, err := t.keyPair(from, ref)
	if pair == nil {
		return "", denied, err
	}
	name = keyName(string(ptr.Deref(ref.Namespace, gwv1.Namespace(from.namespace))), string(ref.Name))
	t.res.Keys[name] = pair
	return name, denied, err
}

// keyName is what the table calls the key of a Secret.
func keyName(namespace, name string) string { return registry.SecretKey + namespace + "/" + name }

// keyPair is key, and returns what the name stands for; nil for nothing.
func (t *translator) keyPair(from referrer, ref gwv1.SecretObjectReference) (pair *tls.Certificate, denied bool, err error) {
	if group, kind := ptr.Deref(ref.Group, ""), ptr.Deref(ref.Kind, "Secret"); group != "" || kind != "Secret" {
		return nil, false, fmt.Errorf("certificate of kind %q, group %q is not supported; supported are Secrets", kind, group)
	}
	namespace := string(ptr.Deref(ref.Namespace, gwv1.Namespace(from.namespace)))
	if !t.granted(from, "", "Secret", namespace, string(ref.Name)) {
		return nil, true, errors.New(t.ungranted(from, "Secret", namespace, string(ref.Name)))
	}
	s := t.secret(namespace, string(ref.Name))
	name := types.NamespacedName{Namespace: namespace, Name: string(ref.Name)}
	if s == nil {
		err = errors.New(t.absentSecret(namespace, string(ref.Name)))
		if pair, until := t.memo.late(name, t.in.Now); pair != nil {
			t.until(until)
			return pair, false, fmt.Errorf("%w; the previous certificate stays in force for %v", err, secretGrace)
		}
		return nil, false, err
	}
	pair, err = t.memo.pair(s)
	if err == nil {
		t.memo.keep(name, pair)
	}
	if err != nil {
		err = fmt.Errorf("Secret %s/%s: %w", namespace, ref.Name, err)
		if pair != nil {
			err = fmt.Errorf("%w; the previous certificate stays in force", err)
		}
	}
	return pair, false, err
}

// resolveClient finds what a Gateway shows to backends that it speaks TLS to.
func (t *translator) resolveClient(g *gateway) {
	if g.Spec.TLS == nil || g.Spec.TLS.Backend == nil || g.Spec.TLS.Backend.ClientCertificateRef == nil {
		return
	}
	key, denied, err := t.key(referrer{gwv1.GroupName, "Gateway", g.Namespace}, *g.Spec.TLS.Backend.ClientCertificateRef)
	if g.client = key; err == nil {
		return
	}
	reason := gwv1.GatewayReasonInvalidClientCertificateRef
	if denied {
		reason = gwv1.GatewayReasonRefNotPermitted
	}
	c := condition(string(gwv1.GatewayConditionResolvedRefs), false, string(reason), "backend.clientCertificateRef: "+err.Error())
	g.clientErr = &c
}

// resolveValidation finds what a listener's clients are verified by. The API has
// this for HTTPS; here it is for TLS listeners with mode Terminate as well. If
// the settings ask for a validation that is not possible, the listener is closed
// and never left open without it.
func (t *translator) resolveValidation(l *listener) {
	v := validation(l.gw.Spec.TLS, l.spec.Port)
	if v == nil {
		return
	}
	from := referrer{gwv1.GroupName, "Gateway", l.gw.Namespace}
	var roots strings.Builder
	good := 0
	for _, ref := range v.CACertificateRefs {
		bundle, reason, err := t.bundle(from, string(ref.Group), string(ref.Kind), string(ptr.Deref(ref.Namespace, gwv1.Namespace(l.gw.Namespace))), string(ref.Name))
		if err != nil {
			if l.refs.Type == "" {
				l.refs = condition(string(gwv1.ListenerConditionResolvedRefs), false, string(reason), "frontend validation: "+err.Error())
			}
			continue
		}
		roots.WriteString(bundle)
		good++
	}
	if good == 0 {
		l.refused = condition(string(gwv1.ListenerConditionAccepted), false, string(gwv1.ListenerReasonNoValidCACertificate), "client certificates are required, but no CA certificate can be used")
		return
	}
	l.ends.ClientCAs = roots.String()
	l.ends.ClientCertOptional = v.Mode == gwv1.AllowInsecureFallback
	l.ends.ClientCertUnverified = l.ends.ClientCertOptional
}

// validation is the one of a port, or else the Gateway's.
func validation(c *gwv1.GatewayTLSConfig, port int32) *gwv1.FrontendTLSValidation {
	if c == nil || c.Frontend == nil {
		return nil
	}
	for _, p := range c.Frontend.PerPort {
		if p.Port == port {
			return p.TLS.Validation
		}
	}
	return c.Frontend.Default.Validation
}

// bundle finds certificates of CAs.
func (t *translator) bundle(from referrer, group, kind, namespace, name string) (string, gwv1.ListenerConditionReason, error) {
	if group != "" || kind != "ConfigMap" {
		return "", gwv1.ListenerReasonInvalidCACertificateKind, fmt.Errorf("CA certificates of kind %q, group %q is not supported; supported are ConfigMaps", kind, group)
	}
	if !t.granted(from, "", "ConfigMap", namespace, name) {
		return "", gwv1.ListenerReasonRefNotPermitted, errors.New(t.ungranted(from, "ConfigMap", namespace, name))
	}
	m := t.configMap(namespace, name)
	if m == nil {
		return "", gwv1.ListenerReasonInvalidCACertificateRef, errors.New(t.absent("configmaps", "ConfigMaps", namespace, fmt.Sprintf("ConfigMap %q in namespace %q", name, namespace)))
	}
	bundle, err := t.memo.roots(m)
	if err != nil {
		return "", gwv1.ListenerReasonInvalidCACertificateRef, fmt.Errorf("ConfigMap %s/%s: %w", namespace, name, err)
	}
	return bundle, "", nil
}

// A memo keeps what was made of Secrets and ConfigMaps, which takes a
// thousand times longer to make than to find, and of EndpointSlices, of which one
// of ten thousand changes at a time. It changes nothing of what follows, but for
// good, what a Secret that has been spoiled was before, and served.
type memo struct {
	mu    sync.Mutex // guards the maps
	pairs map[*corev1.Secret]memoPair
	cas   map[*corev1.ConfigMap]memoCA

	// The last good pairs of Secrets, of the last translation and of this one. That
	// of one which a translation did not use, because it is gone, or because nobody
	// may refer to it, is none any more.
	good, using map[types.UID]*tls.Certificate

	// The pairs of Secrets by their names, in the last translation and in this one: for
	// one that is deleted to be made anew.
	kept, keeping map[types.NamespacedName]keptPair

	// The Gateways that were ours, in the last translation and in this one: that of a
	// class which is gone does not say it.
	served, serving map[types.UID]bool

	// What listeners have had of ports, in the last translation and in this one: their
	// status does not say what they were.
	held, holding map[holder]holding

	// What backends were made of in the last translation and in this one.
	reached, reaching map[reachKey]*reached

	references int // that the last translation made
}

// secretGrace is how long the pair of a Secret that is deleted stays in force: a tool that
// replaces a Secret by deleting it must not make handshakes fail.
const secretGrace = 3 * time.Second

// A keptPair is what a Secret had, and since when it is gone; zero is that it is there.
type keptPair struct {
	pair *tls.Certificate
	gone time.Time
}

func (m *memo) keep(name types.NamespacedName, pair *tls.Certificate) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.keeping[name] = keptPair{pair: pair}
}

// late returns the pair of a Secret that was there shortly before now, and until when it
// is good; or nil. One that no listener referred to in the last translation is not kept.
func (m *memo) late(name types.NamespacedName, now time.Time) (*tls.Certificate, time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	k, ok := m.kept[name]
	if !ok || now.IsZero() {
		return nil, time.Time{}
	}
	if k.gone.IsZero() {
		k.gone = now
	}
	until := k.gone.Add(secretGrace)
	if !now.Before(until) {
		return nil, time.Time{}
	}
	m.keeping[name] = k
	return k.pair, until
}

type memoPair struct {
	pair *tls.Certificate
	err  error
}

type memoCA struct {
	pem string
	err error
}

func newMemo() *memo {
	return &memo{
		pairs: map[*corev1.Secret]memoPair{}, cas: map[*corev1.ConfigMap]memoCA{},
		using: map[types.UID]*tls.Certificate{}, keeping: map[types.NamespacedName]keptPair{}, serving: map[types.UID]bool{}, holding: map[holder]holding{}, reaching: map[reachKey]*reached{},
	}
}

// pair returns a Secret's pair. With an error it is the last good one that the
// same object had while it was in use, or nil.
func (m *memo) pair(s *corev1.Secret) (*tls.Certificate, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.pairs) > 10_000 {
		clear(m.pairs) // of Secrets that have been replaced, mostly
	}
	got, ok := m.pairs[s]
	if !ok {
		got.pair, got.err = parsePair(s)
		m.pairs[s] = got
	}
	good := got.pair
	if got.err != nil && !errors.Is(got.err, errEmpty) {
		good = m.good[s.UID]
	}
	if good != nil && s.UID != "" {
		m.using[s.UID] = good
	}
	return good, got.err
}

// errEmpty is of a Secret out of which the pair was taken: that is no slip.
var errEmpty = fmt.Errorf("its %s and %s are empty", corev1.TLSCertKey, corev1.TLSPrivateKeyKey)

func (m *memo) roots(c *corev1.ConfigMap) (string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.cas) > 10_000 {
		clear(m.cas)
	}
	got, ok := m.cas[c]
	if !ok {
		got.pem, got.err = parseRoots(c)
		m.cas[c] = got
	}
	return got.pem, got.err
}

func parsePair(s *corev1.Secret) (*tls.Certificate, error) {
	if s.Type != corev1.SecretTypeTLS {
		return nil, fmt.Errorf("is of type %q, not %q", s.Type, corev1.SecretTypeTLS)
	}
	cert, key := s.Data[corev1.TLSCertKey], s.Data[corev1.TLSPrivateKeyKey]
	if len(cert) == 0 && len(key) == 0 {
		return nil, errEmpty
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, fmt.Errorf("its %s and %s do not match, or can't be read: %w", corev1.TLSCertKey, corev1.TLSPrivateKeyKey, err)
	}
	return &pair, nil
}

// parseRoots takes the certificates out of a bundle, and nothing that is between
// them. One that can't be read spoils it.
func parseRoots(m *corev1.ConfigMap) (string, error) {
	data, ok := m.Data[caKey]
	if !ok {
		return "", fmt.Errorf("has no key %q", caKey)
	}
	var out strings.Builder
	for rest := []byte(data); ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			continue
		}
		if _, err := x509.ParseCertificate(block.Bytes); err != nil {
			return "", fmt.Errorf("key %q: %w", caKey, err)
		}
		out.Write(pem.EncodeToMemory(&pem.Block{Type: block.Type, Bytes: block.Bytes}))
	}
	if out.Len() == 0 {
		return "", errors.New(`key "` + caKey + `" has no certificate in PEM`)
	}
	return out.String(), nil
}

// auto reports whether a listener is an Istio east-west gateway.
func (l *listener) auto() bool {
	return l.spec.Protocol == gwv1.TLSProtocolType && l.mode() == gwv1.TLSModePassthrough &&
		l.spec.TLS != nil && l.spec.TLS.Options[autoPassthrough] == "true"
}

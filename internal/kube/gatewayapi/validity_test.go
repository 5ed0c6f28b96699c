package gatewayapi

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A certificate that is not valid yet, or no more, is served, and the condition
// says what is wrong with it as long as it is; nothing but time need go by.
func TestCertificateThatIsNotValid(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, edge(terminate)+secret+testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}"))
		from := time.Now().Add(time.Hour).UTC().Truncate(time.Second)
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"abc.example.com"}, NotBefore: from, NotAfter: from.Add(2 * time.Hour)},
			&x509.Certificate{}, key.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		kder, err := x509.MarshalPKCS8PrivateKey(key)
		if err != nil {
			t.Fatal(err)
		}
		s, err := b.core.CoreV1().Secrets("a").Get(t.Context(), "cert", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		s.Data = map[string][]byte{
			"tls.crt": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
			"tls.key": pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: kder}),
		}
		if _, err := b.core.CoreV1().Secrets("a").Update(t.Context(), s, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		var told []map[string]*tls.Certificate
		b.c.cfg.UseKeys = func(all map[string]*tls.Certificate) { told = append(told, all) }
		defer b.start()()
		calm()
		refs := func() metav1.Condition {
			for _, c := range b.gateway("edge").Status.Listeners[0].Conditions {
				if c.Type == "ResolvedRefs" {
					return c
				}
			}
			return metav1.Condition{}
		}
		if u := b.last(); u == nil || u.Listeners[0].Sections[0].TLS == nil || !slices.Equal(u.Listeners[0].Sections[0].TLS.Keys, []string{"secret/a/cert"}) {
			t.Errorf("got %+v, want that it is served", u)
		}
		early := "the certificate for abc.example.com is not valid before " + from.Format(time.RFC3339)
		if c := refs(); c.Status != metav1.ConditionTrue || c.Message != "all references are resolved, but "+early {
			t.Errorf("got %+v, want %q", c, early)
		}
		line := `object="Gateway a/edge" reason=CertificateNotValid why="listener tls: `
		if n := strings.Count(b.log.String(), line+early); n != 1 {
			t.Errorf("got %d lines of it, want one:\n%s", n, b.log)
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		if c := refs(); c.Message != "all references are resolved" {
			t.Errorf("got %+v once it is valid", c)
		}
		time.Sleep(2*time.Hour - 30*time.Minute)
		synctest.Wait()
		if c := refs(); c.Message != "all references are resolved" {
			t.Errorf("got %+v half an hour before its end, of two hours", c)
		}
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		soon := "the certificate for abc.example.com expires at " + from.Add(2*time.Hour).Format(time.RFC3339)
		if c := refs(); c.Status != metav1.ConditionTrue || c.Message != "all references are resolved, but "+soon {
			t.Errorf("got %+v at a fifth before its end, want %q", c, soon)
		}
		if strings.Contains(b.log.String(), soon) {
			t.Error("the log has it twice: the gateway logs it")
		}
		events, err := b.core.CoreV1().Events("a").List(t.Context(), metav1.ListOptions{})
		if err != nil || !slices.ContainsFunc(events.Items, func(e corev1.Event) bool {
			return e.Reason == reasonCertificateExpiresSoon && strings.HasSuffix(e.Message, soon)
		}) {
			t.Errorf("no Event of that: %v, %v", events, err)
		}
		if len(told) == 0 || told[len(told)-1]["secret/a/cert"] == nil || !told[len(told)-1]["secret/a/cert"].Leaf.NotBefore.Equal(from) {
			t.Errorf("the gateway is told %v", told)
		}
		time.Sleep(20 * time.Minute)
		synctest.Wait()
		late := "the certificate for abc.example.com has not been valid since " + from.Add(2*time.Hour).Format(time.RFC3339)
		if c := refs(); c.Status != metav1.ConditionTrue || !strings.HasSuffix(c.Message, late) {
			t.Errorf("got %+v after its end, want %q", c, late)
		}
		if n := strings.Count(b.log.String(), line+late); n != 1 {
			t.Errorf("got %d lines of its end, want one", n)
		}
		before, _ := b.requests()
		time.Sleep(24 * time.Hour)
		synctest.Wait()
		if after, _ := b.requests(); after != before {
			t.Errorf("got %d requests in an idle day after that", after-before)
		}
	})
}

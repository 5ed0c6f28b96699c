// Command inspect is a server for tests of pods: it tells what it finds around
// it, on port 8080.
//
//	/env               its variables, one a line
//	/who               its user, group and host name
//	/file?name=NAME    a file, or the names in a folder
//	/write?name=NAME   writes a file
//	/api?path=PATH     what the API server answers to its ServiceAccount
//	/ready             200, or 503 after /unready
//	/exit?code=N       ends it
//
// After SIGTERM it serves on for the time in $DRAIN, such as 500ms, and ends.
// The command "inspect init FILE" only writes a file.
package main

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

const account = "/var/run/secrets/kubernetes.io/serviceaccount/"

func main() {
	if len(os.Args) == 3 && os.Args[1] == "init" {
		if err := os.WriteFile(os.Args[2], []byte("init was here"), 0o644); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	terminated := make(chan os.Signal, 1)
	signal.Notify(terminated, syscall.SIGTERM)
	go func() {
		<-terminated
		drain, _ := time.ParseDuration(os.Getenv("DRAIN"))
		time.Sleep(drain)
		fmt.Println("ended by SIGTERM")
		os.Exit(0)
	}()
	var unready atomic.Bool
	http.HandleFunc("/env", say(func(*http.Request) (string, error) { return strings.Join(os.Environ(), "\n"), nil }))
	http.HandleFunc("/who", say(func(*http.Request) (string, error) {
		host, err := os.Hostname()
		return fmt.Sprintf("%d %d %s", os.Getuid(), os.Getgid(), host), err
	}))
	http.HandleFunc("/file", say(func(r *http.Request) (string, error) { return look(r.FormValue("name")) }))
	http.HandleFunc("/write", say(func(r *http.Request) (string, error) {
		return "", os.WriteFile(r.FormValue("name"), []byte("written"), 0o644)
	}))
	http.HandleFunc("/api", say(func(r *http.Request) (string, error) { return api(r.FormValue("path")) }))
	http.HandleFunc("/unready", func(http.ResponseWriter, *http.Request) { unready.Store(true) })
	http.HandleFunc("/ready", func(w http.ResponseWriter, _ *http.Request) {
		if unready.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})
	http.HandleFunc("/exit", func(_ http.ResponseWriter, r *http.Request) {
		code, _ := strconv.Atoi(r.FormValue("code"))
		os.Exit(code)
	})
	fmt.Fprintln(os.Stderr, http.ListenAndServe(":8080", nil))
	os.Exit(1)
}

func say(f func(*http.Request) (string, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		answer, err := f(r)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		fmt.Fprint(w, answer)
	}
}

func look(name string) (string, error) {
	entries, err := os.ReadDir(name)
	if err == nil {
		var names []string
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return strings.Join(names, "\n"), nil
	}
	b, err := os.ReadFile(name)
	return string(b), err
}

// api asks as client-go does in a cluster.
func api(path string) (string, error) {
	token, err := os.ReadFile(account + "token")
	if err != nil {
		return "", err
	}
	ca, err := os.ReadFile(account + "ca.crt")
	if err != nil {
		return "", err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	host := net.JoinHostPort(os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT"))
	req, err := http.NewRequest(http.MethodGet, "https://"+host+path, nil)
	if err != nil {
		return "", err
	}
	req.Header.Set("Authorization", "Bearer "+string(token))
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, DisableKeepAlives: true}}
	res, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	return fmt.Sprintf("%d %s", res.StatusCode, b), err
}

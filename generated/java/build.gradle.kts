// The same versions and inputs as pom.xml. Our tests check that they are; they have no Gradle to run it with.
// The plugin 0.9.6 needs Gradle 5.6 or newer.
import com.google.protobuf.gradle.id

plugins {
    `java-library`
    `maven-publish`
    id("com.google.protobuf") version "0.9.6"
}

group = "io.millstream"
version = "0.1.0"

// gradle -Pmillstream.root=… if this folder was copied alone.
val root = file(providers.gradleProperty("millstream.root").getOrElse("../.."))
val grpc = "1.83.1"

repositories { mavenCentral() }

dependencies {
    api("com.google.protobuf:protobuf-java:3.25.8")
    api("io.grpc:grpc-protobuf:$grpc")
    api("io.grpc:grpc-stub:$grpc")
    compileOnly("javax.annotation:javax.annotation-api:1.3.2") // @Generated on the stubs
}

java {
    withSourcesJar()
}

sourceSets {
    main {
        // The plugin puts the protos into the jar too. The load reports (ORCA) stay out: grpc-xds has them.
        proto {
            srcDir(root.resolve("proto"))
            include("millstream/v1/*.proto")
        }
    }
}

protobuf {
    protoc { artifact = "com.google.protobuf:protoc:3.21.12" }
    plugins {
        id("grpc") { artifact = "io.grpc:protoc-gen-grpc-java:1.42.3" }
    }
    generateProtoTasks {
        all().configureEach { plugins { id("grpc") {} } }
    }
}

tasks.withType<JavaCompile>().configureEach { options.release = 8 }

tasks.processResources {
    from(root.resolve("services/millstream_client/service_config")) {
        include("*.json")
        into("io/millstream/v1")
    }
    from(root.resolve("LICENSE")) { into("META-INF") }
}

tasks.jar {
    manifest { attributes("Automatic-Module-Name" to "io.millstream.grpc") }
}

publishing {
    publications { create<MavenPublication>("maven") { from(components["java"]) } }
}
